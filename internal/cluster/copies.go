package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"codeq/internal/base"
	"codeq/internal/peer"
	"codeq/internal/wire"
)

// Two processes may have copies of one directory, for example when a volume is cloned while its
// node is open. Both would vote, and acknowledge, by one ID. So a member admits a new process only
// when no earlier process with that directory has answered this member, or any other member that
// can be asked, for silentElections times ElectionTimeout. Then it refuses the earlier process for
// good, should it come back. If an earlier process answers, the new one is refused as an older
// copy: it lacks the acknowledgements of the other since the copy was made, and the future ones.
//
// A process is identified by its first incarnation, which is in each of its handshakes
// (peer.Incarnations). The later incarnations of the same open directory are the same process.
//
// A member that has just started also asks the others about each process that it knows from before:
// they may have admitted a later one.
//
// A node that asks to be taken back for a former ID is treated in the same way: while a process
// with that ID is up, the node is a copy, and has not lost data.
//
// One thing cannot be detected: a member that does not answer may have contact with an earlier
// process. If the network is divided, that process may be in one part, and the new one in the
// other.

// silentElections times ElectionTimeout is how long a process that gives no answer may still be up.
const silentElections = 3

// anyIncarnation is after all incarnations.
const anyIncarnation = math.MaxUint64

// elderKey identifies the processes that have a directory open and began before an incarnation.
type elderKey struct {
	id    peer.ID
	birth uint64
	known bool // ask only whether a later process was admitted
}

// elders are the searches for earlier processes.
type elders struct {
	mu     sync.Mutex // guards search
	search map[elderKey]*elderSearch
}

// elderSearch looks for processes. err is set before done is closed.
type elderSearch struct {
	done chan struct{}
	err  error // nil: no process answers
}

// end ends a search, and its callers.
func (e *elders) end(key elderKey, s *elderSearch) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.search, key)
	close(s.done)
}

// checkProcess returns the error of awaitElders if the process of a member must not be admitted. A
// process that is known from before is only asked about once, for a later one.
func (n *Node) checkProcess(ctx context.Context, other peer.Identity, incarnations peer.Incarnations) error {
	id := other.ID.String()
	n.membership.mu.Lock()
	known := incarnations.Birth <= n.c.Directory.Seen[id]
	n.membership.mu.Unlock()
	isFirst := len(incarnations.All) == 2 && incarnations.All[0] == 0 && incarnations.All[1] == incarnations.Birth // the directory is new
	if known && n.peer.Admitted(other.ID) > 0 || !known && isFirst {
		return nil
	}
	err := n.awaitElders(ctx, Peer{Node: other.Name, ID: id}, elderKey{other.ID, incarnations.Birth, known})
	if err == nil && ctx.Err() != nil { // the process may have ended meanwhile
		err = fmt.Errorf("%w: the connection is closed", peer.ErrEarly)
	}
	return err
}

// awaitElders returns nil when no process has a directory open that began before an incarnation,
// and no later one was admitted, as far as this node and the other members can tell. An error
// matches ErrOldCopy if there is such a process, or peer.ErrEarly if ctx ends before that is known.
func (n *Node) awaitElders(ctx context.Context, of Peer, key elderKey) error {
	e := &n.elders
	e.mu.Lock()
	s := e.search[key]
	if s == nil {
		s = &elderSearch{done: make(chan struct{}), err: base.ErrClosed}
		put(&e.search, key, s)
		n.background.Go(func() {
			s.err = n.guarded("search for an earlier process", func() error { return n.searchElders(of, key) })
			n.contain("end of a search", func() { e.end(key, s) }, nil)
		})
	}
	e.mu.Unlock()
	select {
	case <-s.done:
		return s.err
	case <-ctx.Done():
		return fmt.Errorf("%w: whether an earlier process with the directory of node %q is open still", peer.ErrEarly, of.Node)
	}
}

// searchElders looks for processes, here and through the other members, until one has answered, or
// none has for long enough, or another member has admitted the process that began in key.birth or a
// later one.
func (n *Node) searchElders(of Peer, key elderKey) error {
	ctx, cancel := context.WithTimeout(n.ctx, silentElections*n.c.ElectionTimeout)
	defer cancel()
	var asks []func(context.Context) (elderAnswer, bool)
	add := func(ask func(context.Context) (elderAnswer, bool)) {
		asks = append(asks, func(ctx context.Context) (elderAnswer, bool) {
			a, ok := ask(ctx)
			if ok && a.Alive {
				sleep(ctx, n.c.HeartbeatTimeout) // an admission by another member takes precedence
			}
			return a, ok
		})
	}
	if !key.known {
		add(func(ctx context.Context) (elderAnswer, bool) {
			at, ok := n.lookForElders(ctx, of, key)
			return elderAnswer{Alive: true, Address: at}, ok
		})
	}
	for _, p := range n.members() {
		if p.ID != n.self.ID && p.ID != of.ID {
			add(func(ctx context.Context) (elderAnswer, bool) { return n.askForElders(ctx, p, of, key) })
		}
	}
	switch a, ok := firstOf(ctx, n, "search for an earlier process", asks); {
	case ok && a.Alive:
		return fmt.Errorf("%w: node %q is open with its directory at %s; close that one before", base.ErrOldCopy, of.Node, a.Address)
	case ok && a.Admitted > key.birth:
		return fmt.Errorf("%w: a later process has the directory of node %q", base.ErrOldCopy, of.Node)
	case !ok && n.ctx.Err() != nil:
		return base.ErrClosed
	}
	return nil
}

// members are the members of all groups, each once.
func (n *Node) members() (members []Peer) {
	for _, p := range n.known() {
		if !slices.ContainsFunc(members, func(o Peer) bool { return o.ID == p.ID }) {
			members = append(members, p)
		}
	}
	return members
}

// addressesOf are the addresses at which a node may be.
func (n *Node) addressesOf(of Peer) (addresses []string) {
	if id, err := peer.ParseID(of.ID); err == nil {
		addresses = append(addresses, n.hints.of(id))
	}
	for _, p := range append(append([]Peer{of}, n.known()...), n.c.Peers...) {
		if (p.ID == of.ID || p.Node == of.Node) && p.Address != "" && !slices.Contains(addresses, p.Address) {
			addresses = append(addresses, p.Address)
		}
	}
	return slices.DeleteFunc(addresses, func(a string) bool { return a == "" })
}

// lookForElders asks for processes at all addresses at which they may be, and over the connections
// that are open, repeatedly until ctx ends, and returns the address of one that has answered.
func (n *Node) lookForElders(ctx context.Context, of Peer, key elderKey) (at string, ok bool) {
	var asks []func(context.Context) (string, bool)
	add := func(ask func(context.Context) (at string, ok bool)) {
		asks = append(asks, func(ctx context.Context) (at string, ok bool) {
			for ; ctx.Err() == nil; base.Pause(ctx, nil) {
				one, end := context.WithTimeout(ctx, n.c.ElectionTimeout)
				at, ok = ask(one)
				end()
				if ok {
					return at, true
				}
			}
			return "", false
		})
	}
	for _, address := range n.addressesOf(of) {
		add(func(ctx context.Context) (string, bool) {
			id, incarnations, err := n.peer.Probe(ctx, peer.Target{Name: of.Node, Address: address})
			return address, err == nil && id == key.id && incarnations.Birth < key.birth
		})
	}
	add(func(ctx context.Context) (string, bool) {
		from, ok := n.peer.Hears(ctx, key.id, key.birth)
		return n.addressOf(of.ID, from), ok
	})
	return firstOf(ctx, n, "look for an earlier process", asks)
}

// addressOf is the listening address, as the groups know it, of a node that has connected from an
// address, perhaps by another port.
func (n *Node) addressOf(id, from string) string {
	for _, p := range n.known() {
		if p.ID == id && p.Address != "" && p.Address != from {
			return p.Address + " (it has connected from " + from + ")"
		}
	}
	return from
}

// elderQuestion asks a member for processes that have a directory open and began before an
// incarnation.
type elderQuestion struct {
	Peer
	Birth uint64
	Wait  time.Duration // for an answer; 0: ask only for the process that was admitted
}

type elderAnswer struct {
	Alive    bool   // one of them has answered
	Address  string // its address
	Admitted uint64 // first incarnation of the last admitted process; 0: none was admitted
}

// askForElders repeats the question to a member until it has answered, or ctx ends.
func (n *Node) askForElders(ctx context.Context, p, of Peer, key elderKey) (a elderAnswer, ok bool) {
	to, err := p.target()
	if err != nil {
		return a, false
	}
	for ; ctx.Err() == nil; base.Pause(ctx, nil) {
		question := elderQuestion{Peer: of, Birth: key.birth}
		if end, _ := ctx.Deadline(); !key.known {
			question.Wait = time.Until(end)
		}
		b, err := n.peer.Introduce(ctx, to, kindElders, wire.AppendJSON(nil, question))
		if err == nil && json.Unmarshal(b, &a) == nil {
			return a, a.Alive || a.Admitted >= key.birth
		}
	}
	return a, false
}

// serveElders answers an elderQuestion when there is an answer, or when its time is over.
func (n *Node) serveElders(r *peer.Request) error {
	var q elderQuestion
	if err := json.Unmarshal(r.Body, &q); err != nil {
		return ErrMalformedCall
	}
	id, err := peer.ParseID(q.ID)
	if err != nil || id == (peer.ID{}) {
		return ErrMalformedCall
	}
	if admitted := n.peer.Admitted(id); admitted >= q.Birth || q.Wait <= 0 {
		r.Reply(wire.AppendJSON(nil, elderAnswer{Admitted: admitted}))
		return nil
	}
	ctx, cancel := context.WithTimeout(n.ctx, min(q.Wait, silentElections*n.c.ElectionTimeout))
	r.OnCancel(cancel)
	n.answer(r, "look for an earlier process", func() ([]byte, error) {
		defer cancel()
		at, alive := n.lookForElders(ctx, q.Peer, elderKey{id: id, birth: q.Birth})
		return wire.AppendJSON(nil, elderAnswer{Alive: alive, Address: at}), nil
	})
	return nil
}

// checkFormer returns an error if a process is up with a former ID of a node that asks to be taken
// back.
func (n *Node) checkFormer(ctx context.Context, j joining) error {
	return errors.Join(n.together("search for a former process", len(j.Former), func(i int) error {
		id := j.Former[i]
		if !slices.ContainsFunc(n.known(), func(p Peer) bool { return p.ID == id }) {
			return nil // it votes nowhere
		}
		former, err := peer.ParseID(id)
		if err != nil {
			return err
		}
		return n.awaitElders(ctx, Peer{j.Node, j.Address, id}, elderKey{id: former, birth: anyIncarnation})
	})...)
}
