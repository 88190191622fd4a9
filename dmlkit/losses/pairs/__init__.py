"""Code shared by the losses over pairs."""
