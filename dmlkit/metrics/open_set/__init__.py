"""Open-set recognition: which queries are of classes that the gallery does not have?"""
