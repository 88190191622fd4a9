"""What a study is: its file, the methods that it compares, and the values that they choose from."""
