"""Images and videos of a data set: from a file to pixels of the recipe's size, and a cache of what they become."""
