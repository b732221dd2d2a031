"""What runs inside the process of a side. It is copied beside both trees: it imports nothing of stackwise.

The side whose code is measured may be an older stackwise, or none at all.
"""
