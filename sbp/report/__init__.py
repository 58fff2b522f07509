"""What a plan looks like to people: text tables, HTML, interactive figures, all read from one summary."""
