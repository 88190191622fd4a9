"""Files that dmlkit writes: whole or not there, typed, and told apart by who wrote them."""
