package codeq

// What tests of the API, in package codeq_test, share with those of the inside, beside the types
// ActiveRun, FlowTest and Process: helpers, and checks of what the API does not show.

const (
	DiskTestFree = diskTestFree
	Gone         = gone
)

var (
	DiskTestLevels      = diskTestLevels
	Alter               = alter
	Beyond31Bits        = beyond31Bits
	Brief               = brief
	Bubble              = bubble
	Buffered            = buffered
	ClaimNow            = claimNow
	ClosedQueue         = closedQueue
	Complete            = complete
	Configure           = configure
	CountCommits        = countCommits
	CountsOf            = countsOf
	Duplicates          = duplicates
	ForShards           = forShards
	Hammer              = hammer
	InFlow              = inFlow
	InfoOf              = infoOf
	KeyOf               = keyOf
	Keyed               = keyed
	LoseLease           = loseLease
	Make100             = make100
	ManyQueues          = manyQueues
	Named               = named
	OpenForRun          = openForRun
	Produce             = produce
	ReadFile            = readFile
	RecursiveListing    = recursiveListing
	RequireInShards     = requireInShards
	RequireNoGroups     = requireNoGroups
	RequireSettled      = requireSettled
	RequireTasks        = requireTasks
	SampleID            = sampleID
	SampleReceipt       = sampleReceipt
	SerialOf            = serialOf
	SettingsOf          = settingsOf
	Sources             = sources
	StartRun            = startRun
	Subscribe           = subscribe
	SyncLogs            = syncLogs
	TakeSettings        = takeSettings
	ThroughSteps        = throughSteps
	UntilCancelled      = untilCancelled
	VerifyImage         = verifyImage
	WriteFile           = writeFile
	CheckAll            = (*Queue).checkAll
	CheckMemory         = (*Queue).checkMemory
	Quiesce             = (*Queue).quiesce
	List                = (*Queue).list
	Bound               = bound
	ErrBroken           = errBroken
	StartingAt          = (*Queue).startingAt
	ReadAll             = (*Queue).readAll
	OfAnotherProcess    = (*Queue).ofAnotherProcess
	ShardOf             = ID.shard
	AbandonsStores      = abandonsStores
	InTime              = inTime
	KeepImages          = keepImages
	LogFromOwner        = logFromOwner
	LogOf               = logOf
	LongestLease        = longestLease
	NewSimVotes         = newSimVotes
	NewUserHandler      = newUserHandler
	OneNode             = oneNode
	Shut                = shut
	SlowDown            = slowDown
	Watched             = watched
	Bulks               = bulks
	Closed              = closed
	ErrBubbleOver       = errBubbleOver
	FirstMoment         = firstMoment
	Forgets             = forgets
	GoesOn              = goesOn
	Hold                = hold
	Killed              = killed
	LastMoment          = lastMoment
	LastWest            = lastWest
	ShortestLease       = shortestLease
	Minutely            = minutely
	TicksOn             = ticksOn
	TicksUntil          = ticksUntil
	WithCronBench       = withCronBench
	CloneOf             = cloneOf
	Contents            = contents
	CorruptFor          = corruptFor
	Flush               = flush
	KindOf              = kindOf
	RecordsIn           = recordsIn
	RequirePebbleFormat = requirePebbleFormat
	Stored              = stored
	TasksOf             = tasksOf
	Unreadable          = unreadable
	VariedDisk          = variedDisk
	VariedNow           = variedNow
	VariedOptions       = variedOptions
	VariedQueue         = variedQueue
)
