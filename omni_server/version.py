"""The version of this package, for modules that must not import all of it."""

VERSION = "0.1.0"
