package codeq_test

import (
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq"
	"codeq/internal/hook"
)

// What these tests share with those of the inside.

const (
	diskTestFree = codeq.DiskTestFree
	gone         = codeq.Gone
)

var (
	diskTestLevels      = codeq.DiskTestLevels
	alter               = codeq.Alter
	beyond31Bits        = codeq.Beyond31Bits
	brief               = codeq.Brief
	bubble              = codeq.Bubble
	buffered            = codeq.Buffered
	claimNow            = codeq.ClaimNow
	closedQueue         = codeq.ClosedQueue
	complete            = codeq.Complete
	configure           = codeq.Configure
	countCommits        = codeq.CountCommits
	countsOf            = codeq.CountsOf
	duplicates          = codeq.Duplicates
	forShards           = codeq.ForShards
	hammer              = codeq.Hammer
	inFlow              = codeq.InFlow
	infoOf              = codeq.InfoOf
	keyOf               = codeq.KeyOf
	keyed               = codeq.Keyed
	loseLease           = codeq.LoseLease
	make100             = codeq.Make100
	manyQueues          = codeq.ManyQueues
	named               = codeq.Named
	openForRun          = codeq.OpenForRun
	produce             = codeq.Produce
	readFile            = codeq.ReadFile
	recursiveListing    = codeq.RecursiveListing
	requireInShards     = codeq.RequireInShards
	requireNoGroups     = codeq.RequireNoGroups
	requireSettled      = codeq.RequireSettled
	requireTasks        = codeq.RequireTasks
	sampleID            = codeq.SampleID
	sampleReceipt       = codeq.SampleReceipt
	serialOf            = codeq.SerialOf
	settingsOf          = codeq.SettingsOf
	sources             = codeq.Sources
	startRun            = codeq.StartRun
	subscribe           = codeq.Subscribe
	syncLogs            = codeq.SyncLogs
	takeSettings        = codeq.TakeSettings
	throughSteps        = codeq.ThroughSteps
	untilCancelled      = codeq.UntilCancelled
	verifyImage         = codeq.VerifyImage
	writeFile           = codeq.WriteFile
	checkAll            = codeq.CheckAll
	checkMemory         = codeq.CheckMemory
	quiesce             = codeq.Quiesce
	list                = codeq.List
	bound               = codeq.Bound
	errBroken           = codeq.ErrBroken
	startingAt          = codeq.StartingAt
	readAll             = codeq.ReadAll
	ofAnotherProcess    = codeq.OfAnotherProcess
	shardOf             = codeq.ShardOf
	abandonsStores      = codeq.AbandonsStores
	inTime              = codeq.InTime
	keepImages          = codeq.KeepImages
	logFromOwner        = codeq.LogFromOwner
	logOf               = codeq.LogOf
	longestLease        = codeq.LongestLease
	newSimVotes         = codeq.NewSimVotes
	newUserHandler      = codeq.NewUserHandler
	oneNode             = codeq.OneNode
	shut                = codeq.Shut
	slowDown            = codeq.SlowDown
	watched             = codeq.Watched
	bulks               = codeq.Bulks
	closed              = codeq.Closed
	errBubbleOver       = codeq.ErrBubbleOver
	firstMoment         = codeq.FirstMoment
	forgets             = codeq.Forgets
	goesOn              = codeq.GoesOn
	hold                = codeq.Hold
	killed              = codeq.Killed
	lastMoment          = codeq.LastMoment
	lastWest            = codeq.LastWest
	shortestLease       = codeq.ShortestLease
	minutely            = codeq.Minutely
	ticksOn             = codeq.TicksOn
	ticksUntil          = codeq.TicksUntil
	withCronBench       = codeq.WithCronBench
	cloneOf             = codeq.CloneOf
	contents            = codeq.Contents
	corruptFor          = codeq.CorruptFor
	flush               = codeq.Flush
	kindOf              = codeq.KindOf
	recordsIn           = codeq.RecordsIn
	requirePebbleFormat = codeq.RequirePebbleFormat
	stored              = codeq.Stored
	tasksOf             = codeq.TasksOf
	unreadable          = codeq.Unreadable
	variedDisk          = codeq.VariedDisk
	variedNow           = codeq.VariedNow
	variedOptions       = codeq.VariedOptions
	variedQueue         = codeq.VariedQueue
	await               = codeq.Await
	awaiting            = codeq.Awaiting
	errDisk             = codeq.ErrDisk
	failShard           = codeq.FailShard
	fillInbox           = codeq.FillInbox
	fillQueue           = codeq.FillQueue
	manifestOf          = codeq.ManifestOf
	payloadsOf          = codeq.PayloadsOf
	peersOf             = codeq.PeersOf
	requireRefused      = codeq.RequireRefused
	threeNodes          = codeq.ThreeNodes
	threeNodesTLS       = codeq.ThreeNodesTLS
	breakable           = codeq.Breakable
	newFailingQueue     = codeq.NewFailingQueue
	watchLeaks          = codeq.WatchLeaks
)

// onDisk is opts, of a queue that lies in fs.
func onDisk[O codeq.Options | codeq.VerifyOptions](fs vfs.FS, opts *O) *O {
	hook.SetFS(opts, fs)
	return opts
}
