"""What a study found, for people: tables, pictures and documents. Nothing is typed by hand."""
