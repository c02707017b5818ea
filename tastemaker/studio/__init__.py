"""The studio: a local web application that shows runs while they train, compares them, and asks people to vote."""
