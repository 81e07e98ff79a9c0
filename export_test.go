package codeq

// What tests of the API, in package codeq_test, share with those of the inside, beside the types
// ActiveRun, FlowTest and Process: helpers, and checks of what the API does not show.

var (
	Awaiting         = awaiting
	Bubble           = bubble
	Buffered         = buffered
	CheckAll         = (*Queue).checkAll
	CheckMemory      = (*Queue).checkMemory
	ClaimNow         = claimNow
	CloneOf          = cloneOf
	ClosedQueue      = closedQueue
	Complete         = complete
	Configure        = configure
	CorruptFor       = corruptFor
	CountsOf         = countsOf
	ErrBroken        = errBroken
	FailShard        = failShard
	FillInbox        = fillInbox
	Flush            = flush
	Hold             = hold
	InFlow           = inFlow
	InfoOf           = infoOf
	KeepImages       = keepImages
	Keyed            = keyed
	KindOf           = kindOf
	List             = (*Queue).list
	LoseLease        = loseLease
	NewFailingQueue  = newFailingQueue
	NewSimVotes      = newSimVotes
	OfAnotherProcess = (*Queue).ofAnotherProcess
	OneNode          = oneNode
	OpenForRun       = openForRun
	Produce          = produce
	Quiesce          = (*Queue).quiesce
	ReadAll          = (*Queue).readAll
	RequireInShards  = requireInShards
	RequireNoGroups  = requireNoGroups
	RequireNoLimits  = requireNoLimits
	RequireSettled   = requireSettled
	RequireTasks     = requireTasks
	SerialOf         = serialOf
	Shut             = shut
	SlowDown         = slowDown
	StartingAt       = (*Queue).startingAt
	Stored           = stored
	TakeSettings     = takeSettings
	TasksOf          = tasksOf
	ThreeNodes       = threeNodes
	ThroughSteps     = throughSteps
	VariedDisk       = variedDisk
	VariedNow        = variedNow
	VariedOptions    = variedOptions
	VariedQueue      = variedQueue
	VerifyImage      = verifyImage
	Watched          = watched
	WithCronBench    = withCronBench
)
