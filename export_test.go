package codeq

// What tests of the API, in package codeq_test, share with those of the inside, beside the types
// ActiveRun, FlowTest and Process: helpers, and checks of what the API does not show.

const (
	Gone = gone
)

var (
	Await            = await
	Awaiting         = awaiting
	Bound            = bound
	Brief            = brief
	Bubble           = bubble
	Buffered         = buffered
	Bulks            = bulks
	CheckAll         = (*Queue).checkAll
	CheckMemory      = (*Queue).checkMemory
	ClaimNow         = claimNow
	CloneOf          = cloneOf
	Closed           = closed
	ClosedQueue      = closedQueue
	Complete         = complete
	Configure        = configure
	CorruptFor       = corruptFor
	CountCommits     = countCommits
	CountsOf         = countsOf
	Duplicates       = duplicates
	ErrBroken        = errBroken
	ErrBubbleOver    = errBubbleOver
	FailShard        = failShard
	FillInbox        = fillInbox
	FillQueue        = fillQueue
	FirstMoment      = firstMoment
	Flush            = flush
	Forgets          = forgets
	ForShards        = forShards
	GoesOn           = goesOn
	Hammer           = hammer
	Hold             = hold
	InFlow           = inFlow
	InfoOf           = infoOf
	KeepImages       = keepImages
	Keyed            = keyed
	KeyOf            = keyOf
	Killed           = killed
	KindOf           = kindOf
	LastMoment       = lastMoment
	LastWest         = lastWest
	List             = (*Queue).list
	LogFromOwner     = logFromOwner
	LogOf            = logOf
	LongestLease     = longestLease
	LoseLease        = loseLease
	Make100          = make100
	Minutely         = minutely
	Named            = named
	NewFailingQueue  = newFailingQueue
	NewSimVotes      = newSimVotes
	OfAnotherProcess = (*Queue).ofAnotherProcess
	OneNode          = oneNode
	OpenForRun       = openForRun
	PayloadsOf       = payloadsOf
	PeersOf          = peersOf
	Produce          = produce
	Quiesce          = (*Queue).quiesce
	ReadAll          = (*Queue).readAll
	RequireInShards  = requireInShards
	RequireNoGroups  = requireNoGroups
	RequireRefused   = requireRefused
	RequireSettled   = requireSettled
	RequireTasks     = requireTasks
	SampleID         = sampleID
	SampleReceipt    = sampleReceipt
	SerialOf         = serialOf
	SettingsOf       = settingsOf
	ShardOf          = ID.shard
	ShortestLease    = shortestLease
	Shut             = shut
	SlowDown         = slowDown
	StartingAt       = (*Queue).startingAt
	StartRun         = startRun
	Stored           = stored
	Subscribe        = subscribe
	TakeSettings     = takeSettings
	TasksOf          = tasksOf
	ThreeNodes       = threeNodes
	ThreeNodesTLS    = threeNodesTLS
	ThroughSteps     = throughSteps
	TicksOn          = ticksOn
	TicksUntil       = ticksUntil
	UntilCancelled   = untilCancelled
	VariedDisk       = variedDisk
	VariedNow        = variedNow
	VariedOptions    = variedOptions
	VariedQueue      = variedQueue
	VerifyImage      = verifyImage
	Watched          = watched
	WithCronBench    = withCronBench
)
