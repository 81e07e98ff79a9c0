package codeq

// What tests of the API, in package codeq_test, share with those of the inside: helpers that look
// at or change what the API does not show, and those that both use and that need a queue. The types
// CronBench, FlowTest and Process have others as methods; what needs no queue is in
// internal/testkit and internal/simtest.

var (
	// Queues, and what runs a test with one.
	Bubble           = bubble
	ClosedQueue      = closedQueue
	InFlow           = inFlow
	NewFailingQueue  = newFailingQueue
	OfAnotherProcess = (*Queue).ofAnotherProcess
	OpenForRun       = openForRun
	StartingAt       = (*Queue).startingAt
	ThreeNodes       = threeNodes
	ThroughSteps     = throughSteps
	WithCronBench    = withCronBench
	WithFullMajority = withFullMajority
	OfNoRoom         = ofNoRoom

	// A queue with all that one may have, and images of its disk.
	CorruptFor    = corruptFor
	KindOf        = kindOf
	ReadAll       = (*Queue).readAll
	TasksOf       = tasksOf
	VariedDisk    = variedDisk
	VariedNow     = variedNow
	VariedOptions = variedOptions
	VariedQueue   = variedQueue
	VerifyImage   = verifyImage

	// Verbs that have to succeed.
	ClaimNow  = claimNow
	Complete  = complete
	Configure = configure
	CountsOf  = countsOf
	InfoOf    = infoOf
	Produce   = produce

	// Arguments, results and errors.
	Buffered  = buffered
	ErrBroken = errBroken
	Keyed     = keyed
	KeyOf     = keyOf
	SerialOf  = serialOf

	// What a test does to a shard.
	FailShard    = failShard
	FillInbox    = fillInbox
	Flush        = flush
	Hold         = hold
	KeepImages   = keepImages
	LoseLease    = loseLease
	Quiesce      = (*Queue).quiesce
	Shut         = shut
	SlowDown     = slowDown
	TakeSettings = takeSettings

	// What shards have in memory and on disk.
	Awaiting        = awaiting
	CheckAll        = (*Queue).checkAll
	CheckMemory     = (*Queue).checkMemory
	List            = (*Queue).list
	RequireInShards = requireInShards
	RequireNoGroups = requireNoGroups
	RequireNoLimits = requireNoLimits
	RequireSettled  = requireSettled
	RequireTasks    = requireTasks
	Stored          = stored
	Watched         = watched
)
