"""Commands and searches on top of everything else, imported where they are used."""
