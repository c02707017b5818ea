"""`python -m tastemaker`, which is how torchrun starts it."""

from .cli import main

main()
