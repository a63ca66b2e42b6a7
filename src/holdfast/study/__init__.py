"""Studies: many runs, where they are kept, and the tables, figures and page that are made of them."""
