package engine

import "container/list"

// former holds the numbers of lanes or queues that left memory last, by name: one of them that
// comes back gets its number again. All others take a new one, since an index on disk would be read
// for each new name.
type former[K comparable] struct {
	names   map[K]*list.Element
	numbers map[uint32]*list.Element
	order   list.List // of named[K]: the first one left first
}

// named is a name with its number.
type named[K comparable] struct {
	name   K
	number uint32
}

// formerLane is the name of a lane whose queue has a number.
type formerLane struct {
	queue uint32
	laneName
}

// formerCap is how many lanes, and how many queues, are held at most.
const formerCap = 1 << 10

// add adds one that leaves memory.
func (f *former[K]) add(name K, number uint32, most int) {
	if f.names == nil {
		f.names, f.numbers = make(map[K]*list.Element), make(map[uint32]*list.Element)
	}
	f.drop(f.names[name])
	e := f.order.PushBack(named[K]{name, number})
	f.names[name], f.numbers[number] = e, e
	if f.order.Len() > most {
		f.drop(f.order.Front())
	}
}

// take returns the number of one that comes back.
func (f *former[K]) take(name K) (number uint32, ok bool) {
	e := f.names[name]
	if e == nil {
		return 0, false
	}
	f.drop(e)
	return e.Value.(named[K]).number, true
}

// remove is called when a number goes to another name, or to none.
func (f *former[K]) remove(number uint32) { f.drop(f.numbers[number]) }

func (f *former[K]) drop(e *list.Element) {
	if e == nil {
		return
	}
	v := e.Value.(named[K])
	delete(f.names, v.name)
	delete(f.numbers, v.number)
	f.order.Remove(e)
}

// formerMost is how many are held.
func (ns *names) formerMost() int { return min(formerCap, ns.config.IdleLanes) }

// returnQueue numbers a queue that comes back, and reports whether its number is known.
func (ns *names) returnQueue(q *Queue) bool {
	c := &ns.catalogue
	n, ok := c.formerQueues.take(q.Name)
	if !ok {
		return false
	}
	if c.sweep != nil {
		c.sweep.queues.Remove(n)
	}
	c.seq++
	q.Number, q.since = n, c.seq
	ns.addQueue(q)
	return true
}

// returnLane loads a lane that comes back; nil if its number is not known.
func (ns *names) returnLane(q *Queue, name laneName) *Lane {
	c := &ns.catalogue
	if q.Number == 0 && !ns.returnQueue(q) {
		return nil
	}
	n, ok := c.formerLanes.take(formerLane{q.Number, name})
	if !ok {
		return nil
	}
	if c.sweep != nil {
		c.sweep.lanes.Remove(n)
	}
	l := newLane(n, q, name.tenant, name.priority)
	ns.addLane(l)
	ns.ready.Load(&l.tasks, 0)
	return l
}
