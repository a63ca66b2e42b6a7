"""Studies: sets of runs, their storage, and the tables, figures and page built from them."""
