"""Code inside the process of a side. It is copied outside of both trees and imports no part of stackwise.

The measured side may have an older stackwise, or none.
"""
