package dispatch

import (
	"math/bits"
	"math/rand/v2"
	"slices"

	"codeq/internal/base"
	"codeq/internal/record"
)

// isWeight reports whether a queue may have a weight.
func isWeight(w int) bool { return w >= 1 && w <= record.MaxWeight }

// CheckWeights looks for a weight that queues may not have: of a queue that is not among them
// (named is false), or out of bounds.
func CheckWeights(queues []string, weights map[string]int) (queue string, named, ok bool) {
	if len(weights) == 0 {
		return "", false, true
	}
	isNamed := func(queue string) bool { return slices.Contains(queues, queue) }
	if len(queues) > ShortList {
		set := make(map[string]bool, len(queues))
		for _, name := range queues {
			set[name] = true
		}
		isNamed = func(queue string) bool { return set[queue] }
	}
	for queue, w := range weights {
		if named := isNamed(queue); !named || !isWeight(w) {
			return queue, named, false
		}
	}
	return "", false, true
}

// lottery draws a member of a subset of 0 to n-1, with a probability in proportion to its weight,
// or the smallest one if there are no weights, in time logarithmic in n. It is a Fenwick tree (P.
// M. Fenwick, A New Data Structure for Cumulative Frequency Tables, 1994) of the members' weights.
type lottery struct {
	weights []int
	tree    []uint64
	members []uint64 // bits
	n       int      // number of members
	total   uint64   // of the members' weights
}

func newLottery(list *List) lottery {
	n := len(list.names)
	return lottery{weights: list.weights, tree: make([]uint64, n+1), members: make([]uint64, (n+63)/64)}
}

func (l *lottery) len() int { return l.n }

func (l *lottery) has(at int) bool { return l.members[at/64]>>(at%64)&1 == 1 }

func (l *lottery) weight(at int) uint64 {
	if len(l.weights) == 0 {
		return 1
	}
	return uint64(l.weights[at])
}

func (l *lottery) add(at int) {
	if !l.has(at) {
		l.members[at/64] |= 1 << (at % 64)
		l.n++
		l.change(at, l.weight(at))
	}
}

func (l *lottery) remove(at int) {
	if l.has(at) {
		l.members[at/64] &^= 1 << (at % 64)
		l.n--
		l.change(at, -l.weight(at))
	}
}

// change adds by to the weight of a member; sums wrap around.
func (l *lottery) change(at int, by uint64) {
	l.total += by
	for i := at + 1; i < len(l.tree); i += i & -i {
		l.tree[i] += by
	}
}

// draw returns a member. REQUIRES: there is one.
func (l *lottery) draw() int {
	if len(l.weights) == 0 {
		return l.find(0)
	}
	return l.find(rand.Uint64N(l.total))
}

// find returns the first member that brings the sum of the weights, its own included, above lot.
// REQUIRES: lot < total.
func (l *lottery) find(lot uint64) int {
	if base.Invariants && lot >= l.total {
		base.Violated("lot %d of %d", lot, l.total)
	}
	at := 0
	for step := 1 << (bits.Len(uint(len(l.tree)-1)) - 1); step > 0; step >>= 1 {
		if next := at + step; next < len(l.tree) && l.tree[next] <= lot {
			at = next
			lot -= l.tree[next]
		}
	}
	return at
}

// drawOrder puts names in random order: each place is drawn in proportion to the weights of those
// that are left. Their number is small.
func drawOrder(names []string, weights []int) {
	for i := range names {
		total := 0
		for _, w := range weights[i:] {
			total += w
		}
		j := i
		for lot := rand.IntN(total) - weights[i]; lot >= 0; lot -= weights[j] {
			j++
		}
		names[i], names[j] = names[j], names[i]
		weights[i], weights[j] = weights[j], weights[i]
	}
}
