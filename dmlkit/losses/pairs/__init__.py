"""What losses over pairs share."""
