"""The names of the plug-in `unickpt.plugins.data`, whose doc this module has."""

from unickpt import doors

# Not put in the place of this module: its modules would be found below this name too, with classes
# of their own.
_plugin = doors.need("names", "data")
__doc__, __all__ = _plugin.__doc__, _plugin.__all__
globals().update({name: getattr(_plugin, name) for name in __all__})
