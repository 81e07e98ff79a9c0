//go:build !unix

package workload

import "time"

// processorTime is 0: it is not known here.
func processorTime() time.Duration { return 0 }
