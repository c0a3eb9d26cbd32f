"""Run the command line as a module."""

from portolan.cli import main

main()
