//go:build cgo && linux

package platform

/*
#include <stdlib.h>
#ifdef __GLIBC__
#include <malloc.h>
static void set_threshold(int bytes) { mallopt(M_MMAP_THRESHOLD, bytes); }
#else
static void set_threshold(int bytes) {}
#endif
*/
import "C"

func setThreshold(bytes int) { C.set_threshold(C.int(bytes)) }
