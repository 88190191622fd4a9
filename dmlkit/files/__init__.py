"""Reading and writing of files: size limits, typed documents, atomic writes, locks, and checks before replacing."""
