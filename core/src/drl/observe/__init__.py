"""What a run leaves behind: its directory, figures, pictures, times, summary and report."""
