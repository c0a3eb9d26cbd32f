from portolan.canonical import *  # temporary
