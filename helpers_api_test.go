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
	abandonsStores      = codeq.AbandonsStores
	alter               = codeq.Alter
	await               = codeq.Await
	awaiting            = codeq.Awaiting
	beyond31Bits        = codeq.Beyond31Bits
	bound               = codeq.Bound
	breakable           = codeq.Breakable
	brief               = codeq.Brief
	bubble              = codeq.Bubble
	buffered            = codeq.Buffered
	bulks               = codeq.Bulks
	checkAll            = codeq.CheckAll
	checkMemory         = codeq.CheckMemory
	claimNow            = codeq.ClaimNow
	closed              = codeq.Closed
	closedQueue         = codeq.ClosedQueue
	complete            = codeq.Complete
	configure           = codeq.Configure
	contents            = codeq.Contents
	corruptFor          = codeq.CorruptFor
	countCommits        = codeq.CountCommits
	countsOf            = codeq.CountsOf
	diskTestLevels      = codeq.DiskTestLevels
	duplicates          = codeq.Duplicates
	errBroken           = codeq.ErrBroken
	errBubbleOver       = codeq.ErrBubbleOver
	errDisk             = codeq.ErrDisk
	failShard           = codeq.FailShard
	fillInbox           = codeq.FillInbox
	fillQueue           = codeq.FillQueue
	firstMoment         = codeq.FirstMoment
	flush               = codeq.Flush
	forgets             = codeq.Forgets
	forShards           = codeq.ForShards
	goesOn              = codeq.GoesOn
	hammer              = codeq.Hammer
	hold                = codeq.Hold
	inFlow              = codeq.InFlow
	infoOf              = codeq.InfoOf
	inTime              = codeq.InTime
	keepImages          = codeq.KeepImages
	keyed               = codeq.Keyed
	keyOf               = codeq.KeyOf
	killed              = codeq.Killed
	kindOf              = codeq.KindOf
	lastMoment          = codeq.LastMoment
	lastWest            = codeq.LastWest
	list                = codeq.List
	logFromOwner        = codeq.LogFromOwner
	logOf               = codeq.LogOf
	longestLease        = codeq.LongestLease
	loseLease           = codeq.LoseLease
	make100             = codeq.Make100
	manifestOf          = codeq.ManifestOf
	manyQueues          = codeq.ManyQueues
	minutely            = codeq.Minutely
	named               = codeq.Named
	newFailingQueue     = codeq.NewFailingQueue
	newUserHandler      = codeq.NewUserHandler
	ofAnotherProcess    = codeq.OfAnotherProcess
	oneNode             = codeq.OneNode
	openForRun          = codeq.OpenForRun
	payloadsOf          = codeq.PayloadsOf
	peersOf             = codeq.PeersOf
	produce             = codeq.Produce
	quiesce             = codeq.Quiesce
	readAll             = codeq.ReadAll
	readFile            = codeq.ReadFile
	recordsIn           = codeq.RecordsIn
	recursiveListing    = codeq.RecursiveListing
	requireInShards     = codeq.RequireInShards
	requireNoGroups     = codeq.RequireNoGroups
	requirePebbleFormat = codeq.RequirePebbleFormat
	requireRefused      = codeq.RequireRefused
	requireSettled      = codeq.RequireSettled
	requireTasks        = codeq.RequireTasks
	sampleID            = codeq.SampleID
	sampleReceipt       = codeq.SampleReceipt
	serialOf            = codeq.SerialOf
	settingsOf          = codeq.SettingsOf
	shardOf             = codeq.ShardOf
	shortestLease       = codeq.ShortestLease
	shut                = codeq.Shut
	slowDown            = codeq.SlowDown
	sources             = codeq.Sources
	startingAt          = codeq.StartingAt
	startRun            = codeq.StartRun
	stored              = codeq.Stored
	subscribe           = codeq.Subscribe
	syncLogs            = codeq.SyncLogs
	takeSettings        = codeq.TakeSettings
	tasksOf             = codeq.TasksOf
	threeNodes          = codeq.ThreeNodes
	threeNodesTLS       = codeq.ThreeNodesTLS
	throughSteps        = codeq.ThroughSteps
	ticksOn             = codeq.TicksOn
	ticksUntil          = codeq.TicksUntil
	unreadable          = codeq.Unreadable
	untilCancelled      = codeq.UntilCancelled
	variedDisk          = codeq.VariedDisk
	variedNow           = codeq.VariedNow
	variedOptions       = codeq.VariedOptions
	variedQueue         = codeq.VariedQueue
	verifyImage         = codeq.VerifyImage
	watched             = codeq.Watched
	watchLeaks          = codeq.WatchLeaks
	withCronBench       = codeq.WithCronBench
	writeFile           = codeq.WriteFile
)

// onDisk is opts, of a queue that lies in fs.
func onDisk[O codeq.Options | codeq.VerifyOptions](fs vfs.FS, opts *O) *O {
	hook.SetFS(opts, fs)
	return opts
}
