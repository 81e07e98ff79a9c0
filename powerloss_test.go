package codeq

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/testkit"
)

// The tests of this file work on a queue whose disk they make images of: what a
// power loss at that moment might leave. Of what was not synced, each 4 KiB
// block and each name in a directory is left or not, by lot. Under load every
// image is compared with the history of the tasks, in which each change has the
// interval of its call.

// serialOf is the serial number in a payload.
func serialOf(payload []byte) int {
	digits, _, _ := strings.Cut(string(payload), " ")
	n, err := strconv.Atoi(digits)
	if err != nil {
		panic(err)
	}
	return n
}

// TestPowerLossAtTheEndOfABlock loses power where a log that nobody syncs may
// come to lack a record in its middle: the operating system has written a
// block of the log when few bytes of it were free, and not again when they
// were used, but has written the next one. Read back, they look like padding.
func TestPowerLossAtTheEndOfABlock(t *testing.T) {
	t.Parallel()
	const block, header, free = 32 << 10, 11, 15
	for _, level := range []Durability{DurabilityProcess, DurabilityNone} {
		t.Run(level.String(), func(t *testing.T) {
			disk := crashfs.New()
			q, err := Open("queue", &Options{Shards: 1, Durability: level, fs: disk})
			require.NoError(t, err)
			defer func() { require.NoError(t, q.Close()) }()
			db := q.shard(0).Store.DB()
			produced := 0
			produce := func(bytes int) (logged int) { // its record of the log has so many bytes more than the payload
				before := db.Metrics().WAL.Size
				produced++
				payload := fmt.Appendf(nil, "%d %s", produced, strings.Repeat("x", bytes))[:bytes]
				_, err := q.Produce(context.Background(), Task{Queue: "a", Payload: payload})
				require.NoError(t, err)
				return int(db.Metrics().WAL.Size-before) - bytes - header
			}
			written := func(n int) { // waits until n bytes of the log are
				require.Eventually(t, func() bool { return testkit.LogSize(t, disk, "queue/shard-000") >= n }, 10*time.Second, time.Millisecond)
			}

			produce(10)
			more := produce(17_000)
			at := int(db.Metrics().WAL.Size)
			require.Less(t, at, block)
			produce(3*block - free - at - 3*header - more)
			require.EqualValues(t, 3*block-free, db.Metrics().WAL.Size)
			written(3*block - free)
			testkit.SyncLogs(t, disk, "queue/shard-000")
			for db.Metrics().WAL.Size <= 4*block {
				produce(100) // Pebble takes long to give up on larger ones
			}
			written(4 * block)

			torn := 0
			for seed := range uint64(20) {
				img := disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: rand.New(rand.NewPCG(seed, 0))})
				q, err := Open("queue", &Options{fs: img})
				require.NoError(t, err)
				require.NoError(t, q.checkAll())
				tasks, err := q.list()
				require.NoError(t, err)
				for _, info := range tasks {
					require.LessOrEqual(t, serialOf(info.Payload), len(tasks), "a gap, seed %d", seed)
				}
				if len(tasks) < produced {
					torn++
				}
				require.NoError(t, q.Close())
			}
			require.NotZero(t, torn)
		})
	}
}
