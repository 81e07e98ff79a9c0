package codeq_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/keys"
)

// What these tests share with those of the inside.

var (
	// Queues, and what runs a test with one.
	bubble           = codeq.Bubble
	closedQueue      = codeq.ClosedQueue
	inFlow           = codeq.InFlow
	newFailingQueue  = codeq.NewFailingQueue
	ofAnotherProcess = codeq.OfAnotherProcess
	openForRun       = codeq.OpenForRun
	startingAt       = codeq.StartingAt
	threeNodes       = codeq.ThreeNodes
	throughSteps     = codeq.ThroughSteps
	withCronBench    = codeq.WithCronBench

	// A queue with all that one may have, and images of its disk.
	corruptFor    = codeq.CorruptFor
	kindOf        = codeq.KindOf
	readAll       = codeq.ReadAll
	tasksOf       = codeq.TasksOf
	variedDisk    = codeq.VariedDisk
	variedNow     = codeq.VariedNow
	variedOptions = codeq.VariedOptions
	variedQueue   = codeq.VariedQueue
	verifyImage   = codeq.VerifyImage

	// Verbs that have to succeed.
	claimNow  = codeq.ClaimNow
	complete  = codeq.Complete
	configure = codeq.Configure
	countsOf  = codeq.CountsOf
	infoOf    = codeq.InfoOf
	produce   = codeq.Produce

	// Arguments, results and errors.
	buffered  = codeq.Buffered
	errBroken = codeq.ErrBroken
	keyed     = codeq.Keyed
	keyOf     = codeq.KeyOf
	serialOf  = codeq.SerialOf

	// What a test does to a shard.
	failShard    = codeq.FailShard
	fillInbox    = codeq.FillInbox
	flush        = codeq.Flush
	hold         = codeq.Hold
	keepImages   = codeq.KeepImages
	loseLease    = codeq.LoseLease
	quiesce      = codeq.Quiesce
	shut         = codeq.Shut
	slowDown     = codeq.SlowDown
	takeSettings = codeq.TakeSettings

	// What shards have in memory and on disk.
	awaiting        = codeq.Awaiting
	checkAll        = codeq.CheckAll
	checkMemory     = codeq.CheckMemory
	list            = codeq.List
	requireInShards = codeq.RequireInShards
	requireNoGroups = codeq.RequireNoGroups
	requireNoLimits = codeq.RequireNoLimits
	requireSettled  = codeq.RequireSettled
	requireTasks    = codeq.RequireTasks
	stored          = codeq.Stored
	watched         = codeq.Watched
)

// onDisk is opts, of a queue that lies in fs.
func onDisk[O codeq.Options | codeq.VerifyOptions | codeq.ReaderOptions](fs vfs.FS, opts *O) *O {
	inspect.Options(opts).FS = fs
	return opts
}

// named returns tasks that are like the given one and have the names as payloads.
func named(like codeq.Task, names ...string) []codeq.Task {
	tasks := make([]codeq.Task, len(names))
	for i, name := range names {
		tasks[i] = like
		tasks[i].Payload = []byte(name)
	}
	return tasks
}

// forShards runs a test in fake time for queues of one shard and of three.
func forShards(t *testing.T, test func(t *testing.T, q *codeq.Queue)) {
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			bubble(t, codeq.Options{Shards: shards, MaxAttempts: 1000, WindowTasks: 8}, test)
		})
	}
}

// shardOf is the shard, of so many, to which a task belongs.
func shardOf(id codeq.ID, shards int) int { return keys.ShardOf(keys.ID(id), shards) }

// child runs a test of this program in a process of its own, and returns when that test says that
// it does what it was told by env: kill ends it at once, and end lets it finish.
func child(t *testing.T, test, env string) (kill, end func()) {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe, "-test.run=^"+test+"$")
	cmd.Env, cmd.Stderr = append(os.Environ(), env), os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // nothing if it has ended
	lines := bufio.NewScanner(out)
	ready := false
	for !ready && lines.Scan() {
		ready = lines.Text() == lockChildSays
	}
	require.True(t, ready, "the child does what it was told")
	kill = func() {
		require.NoError(t, cmd.Process.Kill())
		_ = cmd.Wait()
		_ = in.Close()
	}
	end = func() {
		require.NoError(t, in.Close())
		for lines.Scan() {
		}
		require.NoError(t, cmd.Wait())
	}
	return kill, end
}
