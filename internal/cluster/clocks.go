package cluster

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// The wall clock of a leader decides when data with a lifetime is deleted for good, and sets the
// time in IDs. So that a clock that is set wrong deletes nothing too early, it is compared with the
// clocks of the other members, which are in their answers to heartbeats.

const (
	// clockBound is how far wall clocks may differ. It is more than the difference between clocks
	// that are synchronized at all, and more than the error of a reading, half of a round trip.
	clockBound = 10 * time.Second
	// clockFresh is how long a reading is valid; in this time the clock is assumed to advance as
	// this node's monotonic one.
	clockFresh = 10 * time.Second
	// clockCompared is how long a leader relies on a comparison while its clock is not set.
	clockCompared = time.Second
)

// clockOffsets are the wall clocks of other nodes. The zero value is ready for use.
type clockOffsets struct {
	mu       sync.Mutex // guards readings
	readings map[raft.ServerID]clockReading
}

// clockReading is the time that a clock showed.
type clockReading struct {
	wall, at time.Time // at has a monotonic part
	differs  bool      // from that of this node, by more than clockBound
}

func (r clockReading) shows(now time.Time) time.Time { return r.wall.Add(now.Sub(r.at)) }

// wallMillis is the time of this node's wall clock, in ms.
func (n *Node) wallMillis() uint64 { return uint64(max(n.c.Wall().UnixMilli(), 0)) }

func millis(wall uint64) time.Time { return time.UnixMilli(int64(wall)) }

// noteClock stores the reading in an answer to a message that was sent roundTrip ago.
func (n *Node) noteClock(id raft.ServerID, wall uint64, roundTrip time.Duration) {
	r := clockReading{wall: millis(wall).Add(roundTrip / 2), at: n.c.Mono()}
	ahead := n.c.Wall().Round(0).Sub(r.wall) // without the monotonic part
	r.differs = ahead.Abs() > clockBound
	c := &n.clocks
	c.mu.Lock()
	differed := c.readings[id].differs
	put(&c.readings, id, r)
	c.mu.Unlock()
	switch {
	case r.differs && !differed:
		n.log.Warn("wall clocks differ", "node", peerOf(raft.Server{ID: id}).Node, "ahead of it", ahead.Round(time.Millisecond))
	case differed && !r.differs:
		n.log.Info("wall clocks agree again", "node", peerOf(raft.Server{ID: id}).Node)
	}
}

// clockAhead is by how much a time of this node's wall clock is ahead of the members' clocks: of
// their median, or with an even number of the earlier of the two in the middle. It is zero if that
// is no more than clockBound. It is not known before a majority of the voters has answered
// heartbeats.
func (g *Group) clockAhead(wall time.Time) (ahead time.Duration, known bool) {
	members, err := g.members()
	if err != nil {
		return 0, false
	}
	var clocks []time.Time
	voters, now := votersOf(members), g.node.c.Mono()
	c := &g.node.clocks
	c.mu.Lock()
	for _, m := range voters {
		if m.ID == g.node.self.ServerID() {
			clocks = append(clocks, wall)
		} else if r, ok := c.readings[m.ID]; ok && now.Sub(r.at) < clockFresh {
			clocks = append(clocks, r.shows(now))
		}
	}
	c.mu.Unlock()
	if len(clocks) <= len(voters)/2 {
		return 0, false
	}
	slices.SortFunc(clocks, time.Time.Compare)
	if ahead = wall.Sub(middle(clocks)); ahead <= clockBound {
		return 0, true
	}
	return ahead, true
}

// comparison is the last result of clockAhead. Only the owner of the shard uses it.
type comparison struct {
	wall, at time.Time // at has a monotonic part; zero: there is none
	ahead    uint64    // ms
}

// LeaderAhead is clockAhead in ms for the owner of the shard, which asks often; 2^64-1: it is not
// known. The result may be a second old, unless this node's wall clock was set since. REQUIRES:
// wall is the time of that clock now.
func (g *Group) LeaderAhead(wall uint64) uint64 {
	c, now, shown := &g.compared, g.node.c.Mono(), millis(wall)
	passed := now.Sub(c.at)
	if c.at.IsZero() || passed >= clockCompared || (shown.Sub(c.wall)-passed).Abs() >= clockCompared {
		ahead, known := g.clockAhead(shown)
		if !known {
			return math.MaxUint64
		}
		*c = comparison{shown, now, uint64(ahead / time.Millisecond)}
	}
	return c.ahead
}

// LearnClocks asks the other voters for the time of their clocks, unless the comparison is known.
// It returns when it is known, or after HeartbeatTimeout. A new leader calls it, as it may not yet
// have had an answer to a heartbeat.
func (g *Group) LearnClocks() {
	g.compared = comparison{}
	n := g.node
	members, err := g.members()
	if _, known := g.clockAhead(n.c.Wall()); known || err != nil {
		return
	}
	ctx, stop := context.WithTimeout(n.ctx, n.c.HeartbeatTimeout)
	defer stop()
	answers := make(chan struct{}, len(members))
	for _, m := range members {
		n.run("question for a clock", func() {
			defer func() { answers <- struct{}{} }()
			sent := time.Now()
			if states, err := n.stateOf(ctx, peerOf(m)); err == nil && len(states) > 0 {
				n.noteClock(m.ID, states[0].Wall, time.Since(sent))
			}
		}, nil)
	}
	for range members {
		<-answers
		if _, known := g.clockAhead(n.c.Wall()); known {
			return
		}
	}
}

// middle is the median of a sorted list; of an even number, the smaller of the two in the middle.
func middle[T any](sorted []T) T { return sorted[(len(sorted)-1)/2] }
