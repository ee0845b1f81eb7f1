"""One module per plugin kind: its ABC and the data classes that only this kind uses."""
