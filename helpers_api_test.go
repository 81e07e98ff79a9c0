package codeq_test

import (
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq"
	"codeq/internal/hook"
)

// What these tests share with those of the inside.

var (
	await            = codeq.Await
	awaiting         = codeq.Awaiting
	brief            = codeq.Brief
	bubble           = codeq.Bubble
	buffered         = codeq.Buffered
	bulks            = codeq.Bulks
	checkAll         = codeq.CheckAll
	checkMemory      = codeq.CheckMemory
	claimNow         = codeq.ClaimNow
	cloneOf          = codeq.CloneOf
	closedQueue      = codeq.ClosedQueue
	complete         = codeq.Complete
	configure        = codeq.Configure
	corruptFor       = codeq.CorruptFor
	countCommits     = codeq.CountCommits
	countsOf         = codeq.CountsOf
	duplicates       = codeq.Duplicates
	errBroken        = codeq.ErrBroken
	errBubbleOver    = codeq.ErrBubbleOver
	failShard        = codeq.FailShard
	fillInbox        = codeq.FillInbox
	fillQueue        = codeq.FillQueue
	firstMoment      = codeq.FirstMoment
	flush            = codeq.Flush
	forShards        = codeq.ForShards
	hammer           = codeq.Hammer
	hold             = codeq.Hold
	inFlow           = codeq.InFlow
	infoOf           = codeq.InfoOf
	keepImages       = codeq.KeepImages
	keyed            = codeq.Keyed
	kindOf           = codeq.KindOf
	lastMoment       = codeq.LastMoment
	lastWest         = codeq.LastWest
	list             = codeq.List
	logFromOwner     = codeq.LogFromOwner
	logOf            = codeq.LogOf
	longestLease     = codeq.LongestLease
	loseLease        = codeq.LoseLease
	make100          = codeq.Make100
	named            = codeq.Named
	newFailingQueue  = codeq.NewFailingQueue
	newSimVotes      = codeq.NewSimVotes
	ofAnotherProcess = codeq.OfAnotherProcess
	oneNode          = codeq.OneNode
	openForRun       = codeq.OpenForRun
	peersOf          = codeq.PeersOf
	produce          = codeq.Produce
	quiesce          = codeq.Quiesce
	readAll          = codeq.ReadAll
	requireInShards  = codeq.RequireInShards
	requireNoGroups  = codeq.RequireNoGroups
	requireRefused   = codeq.RequireRefused
	requireSettled   = codeq.RequireSettled
	requireTasks     = codeq.RequireTasks
	sampleID         = codeq.SampleID
	sampleReceipt    = codeq.SampleReceipt
	serialOf         = codeq.SerialOf
	settingsOf       = codeq.SettingsOf
	shardOf          = codeq.ShardOf
	shortestLease    = codeq.ShortestLease
	shut             = codeq.Shut
	slowDown         = codeq.SlowDown
	startingAt       = codeq.StartingAt
	startRun         = codeq.StartRun
	stored           = codeq.Stored
	subscribe        = codeq.Subscribe
	takeSettings     = codeq.TakeSettings
	tasksOf          = codeq.TasksOf
	threeNodes       = codeq.ThreeNodes
	threeNodesTLS    = codeq.ThreeNodesTLS
	throughSteps     = codeq.ThroughSteps
	untilCancelled   = codeq.UntilCancelled
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
