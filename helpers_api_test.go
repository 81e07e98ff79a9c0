package codeq_test

import (
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq"
	"codeq/internal/hook"
	"codeq/internal/keys"
)

// What these tests share with those of the inside.

var (
	awaiting         = codeq.Awaiting
	bubble           = codeq.Bubble
	buffered         = codeq.Buffered
	checkAll         = codeq.CheckAll
	checkMemory      = codeq.CheckMemory
	claimNow         = codeq.ClaimNow
	cloneOf          = codeq.CloneOf
	closedQueue      = codeq.ClosedQueue
	complete         = codeq.Complete
	configure        = codeq.Configure
	corruptFor       = codeq.CorruptFor
	countsOf         = codeq.CountsOf
	errBroken        = codeq.ErrBroken
	failShard        = codeq.FailShard
	fillInbox        = codeq.FillInbox
	flush            = codeq.Flush
	hold             = codeq.Hold
	inFlow           = codeq.InFlow
	infoOf           = codeq.InfoOf
	keepImages       = codeq.KeepImages
	keyed            = codeq.Keyed
	kindOf           = codeq.KindOf
	list             = codeq.List
	loseLease        = codeq.LoseLease
	newFailingQueue  = codeq.NewFailingQueue
	newSimVotes      = codeq.NewSimVotes
	ofAnotherProcess = codeq.OfAnotherProcess
	oneNode          = codeq.OneNode
	openForRun       = codeq.OpenForRun
	produce          = codeq.Produce
	quiesce          = codeq.Quiesce
	readAll          = codeq.ReadAll
	requireInShards  = codeq.RequireInShards
	requireNoGroups  = codeq.RequireNoGroups
	requireNoLimits  = codeq.RequireNoLimits
	requireSettled   = codeq.RequireSettled
	requireTasks     = codeq.RequireTasks
	serialOf         = codeq.SerialOf
	shut             = codeq.Shut
	slowDown         = codeq.SlowDown
	startingAt       = codeq.StartingAt
	stored           = codeq.Stored
	takeSettings     = codeq.TakeSettings
	tasksOf          = codeq.TasksOf
	threeNodes       = codeq.ThreeNodes
	throughSteps     = codeq.ThroughSteps
	variedDisk       = codeq.VariedDisk
	variedNow        = codeq.VariedNow
	variedOptions    = codeq.VariedOptions
	variedQueue      = codeq.VariedQueue
	verifyImage      = codeq.VerifyImage
	watched          = codeq.Watched
	withCronBench    = codeq.WithCronBench
)

// onDisk is opts, of a queue that lies in fs.
func onDisk[O codeq.Options | codeq.VerifyOptions](fs vfs.FS, opts *O) *O {
	hook.SetFS(opts, fs)
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
