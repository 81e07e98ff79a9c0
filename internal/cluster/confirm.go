package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
)

// A leader may have a successor and not know it. Before it answers a read, it asks the voters. A
// voter that knows no later term has neither elected a successor nor stored an entry of one; if a
// majority answers so, there was no successor at that moment. So the read reflects every call that
// returned before the question was sent.
//
// Raft's VerifyLeader is not used. It also counts answers to messages that were sent before the
// question, answers of nodes without a vote, and refusals, which replicate reports as success.

// confirming is the questions of a group that wait for answers. The zero value is ready for use.
type confirming struct {
	mu    sync.Mutex // guards the fields below, and the questions
	open  []*question
	asked map[raft.ServerID]bool // voters that a goroutine asks now
}

// question asks whether a majority of the voters knows no term after this one.
type question struct {
	term    uint64
	silent  []raft.Server // voters without an answer so far, except this node
	needed  int           // of silent, for a majority
	outcome chan error    // capacity 1
}

// Confirm checks that no other node has become the leader since a term of this one, so that reads
// in it are still valid. It takes as long as a message to the voters and back; questions that come
// meanwhile share the next message.
func (g *Group) Confirm(term uint64) error {
	if err := g.beginProposal(); err != nil {
		return err
	}
	defer g.pendingProposals.leave()
	if err := g.askVoters(term); err != nil {
		return fmt.Errorf("%w: shard %d, term %d: %w", base.ErrNotLeader, g.index, term, err) // certain: there was no entry
	}
	g.work.Add(1)
	return g.isIn(term) // this node is a voter as well
}

func (g *Group) askVoters(term uint64) error {
	if err := g.isLeaderIn(term); err != nil {
		return err
	}
	members, err := g.members()
	if err != nil {
		return err
	}
	q := newQuestion(term, g.node.self.ServerID(), members)
	if q.needed == 0 {
		return nil
	}
	for _, v := range g.confirming.add(q) {
		g.node.run("question to a voter", func() { g.ask(v.ID) }, g.Fail)
	}
	defer g.confirming.drop(q)
	// Raft steps down before that if it has no answer of a majority.
	patience := time.NewTimer(2 * g.node.c.ElectionTimeout)
	defer patience.Stop()
	for {
		change := g.route.next()
		if err := cmp.Or(g.isLeaderIn(term), g.isIn(term)); err != nil {
			return err
		}
		select {
		case err := <-q.outcome:
			return err
		case <-change:
		case <-patience.C:
			return fmt.Errorf("no majority has answered within %v", 2*g.node.c.ElectionTimeout)
		}
	}
}

var errSteppedDown = errors.New("this node has stepped down")

// isLeaderIn returns an error if Raft no longer leads in this term.
func (g *Group) isLeaderIn(term uint64) error {
	if g.raft.State() != raft.Leader || g.raft.CurrentTerm() != term {
		return errSteppedDown
	}
	return g.Failure()
}

func newQuestion(term uint64, self raft.ServerID, members []raft.Server) *question {
	silent := votersOf(members)
	voters := len(silent)
	silent = slices.DeleteFunc(silent, func(m raft.Server) bool { return m.ID == self })
	return &question{term: term, outcome: make(chan error, 1), silent: silent, needed: voters/2 + 1 - (voters - len(silent))}
}

// ask sends heartbeats to a voter, one at a time, until the voter has answered every question.
func (g *Group) ask(voter raft.ServerID) {
	req := &raft.AppendEntriesRequest{RPCHeader: g.transport.header()}
	for again := (base.Patience{}); ; {
		questions, to := g.confirming.next(voter)
		if len(questions) == 0 {
			return
		}
		req.Term = questions[0].term
		var resp raft.AppendEntriesResponse
		err := g.transport.ask(to, req, &resp)
		if err == nil && g.confirming.answer(voter, questions, &resp) {
			again = base.Patience{}
		} else if !again.Wait(g.node.ctx, nil) {
			return
		}
	}
}

// add opens a question. It returns the voters that need a goroutine, which the caller starts.
func (c *confirming) add(q *question) (ask []raft.Server) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open = append(c.open, q)
	for _, v := range q.silent {
		if !c.asked[v.ID] {
			put(&c.asked, v.ID, true)
			ask = append(ask, v)
		}
	}
	return ask
}

// drop closes a question.
func (c *confirming) drop(q *question) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open = slices.DeleteFunc(c.open, func(o *question) bool { return o == q })
}

// next returns the questions of the latest term that a voter has not answered, and its address. If
// there are none, the voter has no goroutine from now on.
func (c *confirming) next(voter raft.ServerID) (questions []*question, to raft.Server) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, q := range c.open {
		at := slices.IndexFunc(q.silent, func(v raft.Server) bool { return v.ID == voter })
		if at < 0 {
			continue
		}
		if len(questions) > 0 && q.term > questions[0].term {
			questions = questions[:0]
		}
		if len(questions) == 0 || q.term == questions[0].term {
			questions, to = append(questions, q), q.silent[at]
		}
	}
	if len(questions) == 0 {
		delete(c.asked, voter)
	}
	return questions, to
}

// answer evaluates the answer of a voter to a message that was sent after these questions, which
// have one term, had come. It is false if the answer decides nothing.
func (c *confirming) answer(voter raft.ServerID, questions []*question, resp *raft.AppendEntriesResponse) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	var err error
	switch term := questions[0].term; {
	case resp.Term > term:
		err = fmt.Errorf("node %s is in term %d", voter, resp.Term)
	case !resp.Success || resp.Term < term:
		return false
	}
	for _, q := range questions {
		q.silent = slices.DeleteFunc(q.silent, func(v raft.Server) bool { return v.ID == voter })
		if q.needed--; q.needed == 0 || err != nil {
			select {
			case q.outcome <- err:
			default: // it has one
			}
		}
	}
	return true
}
