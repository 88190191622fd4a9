"""Reviews: a person checks labels that a gallery gives to images."""
