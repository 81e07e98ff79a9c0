// Package malloc has the C library give back the memory of large blocks that are freed.
//
// Pebble takes its memtables from C, where they are not the garbage collector's. The GNU C library
// maps large blocks and unmaps them when they are freed; but with the first one that is freed it
// raises what it calls large, to up to 32 MiB, and from then on keeps freed memtables in arenas, of
// which there are up to eight for each processor: hundreds of megabytes that are of no use to
// anybody.
package malloc

import (
	"os"
	"strings"
	"sync"
)

// largeBytes is where large blocks begin: below the size of usual memtables, and above what
// programs allocate often.
const largeBytes = 4 << 20

// ReturnLarge has blocks of 4 MiB and more that are freed given back to the system, in the whole
// process and from now on. It does nothing without cgo, with another C library, or if the
// environment sets the limit (MALLOC_MMAP_THRESHOLD_, GLIBC_TUNABLES), which then is the user's.
var ReturnLarge = sync.OnceFunc(func() {
	if os.Getenv("MALLOC_MMAP_THRESHOLD_") == "" && !strings.Contains(os.Getenv("GLIBC_TUNABLES"), "mmap_threshold") {
		setThreshold(largeBytes)
	}
})
