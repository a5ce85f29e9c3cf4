"""A file of cells with a set that names one wrongly."""

CELLS = ("single-shared-xs-math",)
SETS = {"all": ("single-shared-xs-math", "single-shared-xs-maths")}
