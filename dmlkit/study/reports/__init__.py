"""Reports of studies: tables, pictures and documents, all generated from the results."""
