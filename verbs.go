package codeq

import (
	"context"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/listing"
	"codeq/internal/owner"
)

type operation interface {
	// resolve decides the operation against the shard's memory and adds its keys to the group. It
	// calls shard.settleAfterCommit once it is decided, now or, if a claim waits, in a later group.
	resolve(s *shard)
	verb() *verb
	// settle wakes the caller: by the decision of resolve, if the group has persisted, or with err.
	settle(err error)
}

// sharedOp is an operation that may wait in several shards; one of them answers it: a claim.
type sharedOp interface {
	operation
	// noRoom makes it go on in another shard, as this one has no room for its writes.
	noRoom(s *shard)
	// refuse is settle for an operation that will not be resolved, and ends the shard's reference.
	refuse(reason error)
	// Take makes the caller's answer that of this shard; false: the answer is another one's.
	Take() bool
}

func refuse(op operation, reason error) {
	if shared, ok := op.(sharedOp); ok {
		shared.refuse(reason)
		return
	}
	op.settle(reason)
}

// completion is the part of an operation that its caller waits on.
type completion struct {
	done chan error // capacity 1: a caller that has gone does not block the owner
	err  error      // decided by resolve
	kind callKind   // which of verbs it is
	// reply is called in place of sending to done, if the caller is elsewhere. It must not block.
	reply func(error)
}

func (c *completion) base() *completion { return c }

func (c *completion) verb() *verb { return &verbs[c.kind] }

func (c *completion) settle(err error) {
	if err == nil {
		err = c.err
	}
	if c.reply != nil {
		c.reply(err)
		return
	}
	select {
	case c.done <- err:
	default: // it has an answer: its owner has panicked meanwhile
	}
}

// wait returns the outcome. If it is not settled, the operation is under way, and the shard's.
func (c *completion) wait(ctx context.Context, limit *base.Limit) (settled bool, err error) {
	return base.Await(ctx, limit, c.done)
}

func newCompletion(kind callKind) completion {
	return completion{done: make(chan error, 1), kind: kind}
}

// comesOnLease reports whether the lease of an operation is judged by the time of its arrival.
func comesOnLease(op operation) bool { return op.verb().is(onLease) }

// verb has the properties of a kind of operation. Entries of verbs name no fields: none is omitted.
type verb struct {
	new        func(from string) request   // for decoding a call of another node; nil: nodes do not call it
	room       func(operation) engine.Room // the lowest level of free space at which it still runs
	repeatable func(request) bool          // resolved twice, it has the same effect as once
	traits     trait
}

type trait uint16

const (
	readsOnly  trait = 1 << iota // changes nothing, so that one without an answer is not uncertain
	onLease                      // extends or ends a lease: so the time at which it came matters
	endsLease                    // the first try that is applied ends the lease, and later ones find it lost
	waitsRoom                    // waits for room, as no caller would repeat it
	ofMembers                    // is refused to a node that was removed: its workers may end their begun tasks
	ofPrograms                   // is served to programs beside the process
	waits                        // on purpose, as long as its caller does
	urgent                       // waits for nothing that is sent between nodes: it is short, and keeps leases
)

func (v *verb) is(t trait) bool { return v.traits&t != 0 }

type callKind byte

const (
	callProduce callKind = iota + 1
	callClaim
	callComplete
	callFail
	callExtend
	callRenew
	callAlter
	callAwait
	_ // 9
	callStats
	callIdle
	callReleaseKey
	callSetSchedule
	callDeleteSchedule
	callSchedules
	callMessages
	callRead
	callIndex
	callInterest
	callSettings
	callConfigure
	callAdopt
	callMember
	callPermits
	callAskPermits
	callBarrier
	callResume
	callPage
	callFind
	callAlterMany
	callInfo
	callTotals
	callDays
	callNote
	callPauseSchedule
	callTaken
	callMissing
	callClock
	callUse
	callLeases
	callStep
	callSignal
	_ // 43
	callCall
	callFindSchedule
	callMany
	callDeadKinds
	endOfRequests
)

var _ [cluster.OwnKinds - endOfRequests]struct{} // larger kinds are those of the cluster

var verbs = [endOfRequests]verb{
	callProduce:        {newProduce, upTo(engine.Roomy), isNumbered, ofPrograms},
	callClaim:          {newClaim, upTo(engine.RoomLow), no, ofMembers},
	callComplete:       {blank[completeOp](callComplete), roomOfComplete, yes, onLease | endsLease | ofPrograms},
	callFail:           {blank[failOp](callFail), upTo(engine.RoomScarce), yes, onLease | endsLease | ofPrograms},
	callExtend:         {ruled[call.Extend](callExtend), upTo(engine.RoomScarce), yes, onLease | urgent | ofPrograms},
	callRenew:          {ruled[call.Renew](callRenew), upTo(engine.RoomEmpty), yes, onLease | urgent}, // writes almost nothing
	callAlter:          {ruled[call.Alter](callAlter), roomOfBody, no, ofMembers | ofPrograms},
	callAwait:          {blank[awaitOp](callAwait), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms | waits},
	callStats:          {ruled[call.Stats](callStats), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms},
	callIdle:           {blank[idleOp](callIdle), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms | waits},
	callReleaseKey:     {ruled[call.ReleaseKey](callReleaseKey), upTo(engine.RoomNone), no, ofMembers | ofPrograms}, // unless the task has not ended
	callSetSchedule:    {ruled[call.SetSchedule](callSetSchedule), upTo(engine.Roomy), yes, ofMembers | ofPrograms},
	callDeleteSchedule: {ruled[call.DeleteSchedule](callDeleteSchedule), upTo(engine.RoomNone), no, ofMembers | ofPrograms},
	callSchedules:      {ruled[schedulesPart](callSchedules), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms},
	callMessages:       {blank[messageBatch](callMessages), upTo(engine.RoomLow), yes, waitsRoom},
	callRead:           {reading(callRead, func() lookup { return listing.NewOne(false, taskInfo) }), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms},
	callIndex:          {blank[indexOp](callIndex), upTo(engine.RoomEmpty), yes, ofMembers},
	callInterest:       {blank[interestOp](callInterest), upTo(engine.RoomScarce), yes, waitsRoom},
	callSettings:       {ruled[call.Settings](callSettings), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms},
	callConfigure:      {ruled[call.Configure](callConfigure), upTo(engine.RoomScarce), no, ofMembers | ofPrograms},
	callAdopt:          {ruled[call.Adopt](callAdopt), upTo(engine.RoomScarce), yes, ofPrograms},
	callMember:         {blank[memberOp](callMember), upTo(engine.RoomScarce), yes, waits},
	callPermits:        {blank[permitsOp](callPermits), upTo(engine.RoomEmpty), yes, waits},
	callAskPermits:     {blank[askPermitsOp](callAskPermits), upTo(engine.RoomEmpty), yes, waits},
	callBarrier:        {blank[barrierOp](callBarrier), upTo(engine.RoomScarce), no, ofMembers},
	callResume:         {blank[resumeOp](callResume), upTo(engine.RoomEmpty), no, 0},
	callPage:           {reading(callPage, func() lookup { return newLister(listing.Query{}) }), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms},
	callFind:           {reading(callFind, func() lookup { return listing.NewOne(true, taskInfo) }), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms},
	callAlterMany:      {ruled[call.AlterMany](callAlterMany), roomOfBody, no, ofMembers | ofPrograms},
	callInfo:           {ruled[call.Info](callInfo), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms},
	callTotals:         {ruled[call.Totals](callTotals), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms},
	callDays:           {ruled[call.Days](callDays), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms},
	callNote:           {ruled[call.Note](callNote), upTo(engine.RoomEmpty), yes, onLease},
	callPauseSchedule:  {ruled[call.PauseSchedule](callPauseSchedule), upTo(engine.RoomScarce), yes, ofMembers | ofPrograms},
	callTaken:          {blank[takenOp](callTaken), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms},
	callUse:            {reading(callUse, func() lookup { return new(listing.Use) }), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms},
	callLeases:         {blank[leaseOps](callLeases), upTo(engine.RoomEmpty), yes, onLease | endsLease | ofPrograms}, // each has its own
	callMissing:        {ruled[call.Missing](callMissing), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms},
	callStep:           {blank[stepOp](callStep), upTo(engine.RoomScarce), yes, onLease},
	callSignal:         {ruled[call.Signal](callSignal), upTo(engine.RoomLow), no, ofMembers | ofPrograms},
	callCall:           {blank[callOp](callCall), upTo(engine.Roomy), no, ofPrograms | waits},
	callFindSchedule:   {ruled[call.FindSchedule](callFindSchedule), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms},
	callMany:           {reading(callMany, func() lookup { return listing.NewMany(taskInfo) }), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms},
	callDeadKinds:      {reading(callDeadKinds, func() lookup { return new(listing.DeadKinds) }), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms},
	callClock:          {ruled[call.Clock](callClock), upTo(engine.RoomEmpty), yes, readsOnly | ofMembers | ofPrograms},
}

// The verbs of notices: internalParks wait for room on the disk.
var (
	internal      = verb{nil, upTo(engine.RoomEmpty), no, 0} // it writes nothing
	internalParks = verb{nil, upTo(engine.RoomScarce), no, waitsRoom}
	confirmVerb   = verb{nil, upTo(engine.RoomNone), no, waitsRoom}
)

// notice is an operation that no caller waits for, sent by owners, callers and their goroutines.
type notice struct {
	of *verb
	do func(*shard)
}

func (n *notice) resolve(s *shard) { n.do(s) }
func (n *notice) settle(error)     {}
func (n *notice) verb() *verb      { return n.of }

// notify makes an owner do something in its turn. An owner that ends does not: it has nothing then
// that the notice would change, and the next leader of its shard learns of it in another way.
func notify(inbox *owner.Inbox[operation], of *verb, do func(*shard)) {
	_ = inbox.Pass(&notice{of, do})
}

func newClaim(string) request {
	op := &claimOp{completion: completion{kind: callClaim}, Claim: dispatch.Claim{Remote: true}}
	op.Caller = op
	return op
}

func blank[T any, P interface {
	*T
	request
}](kind callKind) func(string) request {
	return func(string) request {
		op := P(new(T))
		op.base().kind = kind
		return op
	}
}

func reading(kind callKind, l func() lookup) func(string) request {
	return func(string) request { return &readOp{completion: completion{kind: kind}, lookup: l()} }
}

// ruling is an operation that the rules decide by themselves.
type ruling struct {
	completion
	call.Body
}

func rule(kind callKind, b call.Body) *ruling {
	return &ruling{completion: newCompletion(kind), Body: b}
}

func ruled[T any, P interface {
	*T
	call.Body
}](kind callKind) func(string) request {
	return func(string) request { return rule(kind, P(new(T))) }
}

func (op *ruling) resolve(s *shard) {
	v, err := op.Decide(&s.rules)
	s.conclude(op, &op.completion, v, err)
}

// upTo returns the room of operations that all run down to the same level.
func upTo(level engine.Room) func(operation) engine.Room {
	return func(operation) engine.Room { return level }
}

func roomOfBody(op operation) engine.Room {
	return op.(*ruling).Body.(interface{ Room() engine.Room }).Room()
}

func roomOfComplete(op operation) engine.Room {
	if len(op.(*completeOp).Next) > 0 {
		return engine.RoomScarce
	}
	return engine.RoomNone // unless the task is kept
}

func yes(request) bool           { return true }
func no(request) bool            { return false }
func isNumbered(op request) bool { return op.(*produceOp).Call.Seq != 0 }
