"""A reward as a service: what travels, who scores, and who answers."""
