"""Files that dmlkit reads and writes: measured and typed, whole or not there, and told apart by who wrote them."""
