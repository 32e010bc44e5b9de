"""Set-up of the checkout. Run from the Makefile; nothing here is installed or imported by the product."""
