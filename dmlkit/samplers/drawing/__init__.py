"""Drawing items without repeating any too soon."""
