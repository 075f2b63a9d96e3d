/* What the files of the compiled part share. */

#ifndef SHADOWRUN_CORE_H
#define SHADOWRUN_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#endif
