package platform

import (
	"os"
	"strings"
	"sync"
)

// Pebble allocates its memtables with C, outside of the garbage collector. The GNU C library maps
// large blocks and unmaps them when they are freed; but when the first one is freed it raises its
// limit for large blocks, to up to 32 MiB, and from then on keeps freed memtables in arenas, up to
// eight for each processor: hundreds of unusable megabytes.

// largeBytes is the size of the smallest large block: below the size of usual memtables, and above
// what programs allocate often.
const largeBytes = 4 << 20

// ReturnLargeBlocks makes the whole process give back freed blocks of 4 MiB and more to the system
// from now on. It does nothing without cgo, with another C library, or if the environment sets the
// limit (MALLOC_MMAP_THRESHOLD_, GLIBC_TUNABLES), which is then the user's choice.
var ReturnLargeBlocks = sync.OnceFunc(func() {
	if os.Getenv("MALLOC_MMAP_THRESHOLD_") == "" && !strings.Contains(os.Getenv("GLIBC_TUNABLES"), "mmap_threshold") {
		setThreshold(largeBytes)
	}
})
