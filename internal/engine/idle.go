package engine

// Idleness is the question whether queues are idle, all queues if none is named. It is asked
// repeatedly.
type Idleness struct {
	Queues  []string
	Arrived uint64 // tasks of the queues that had come from other shards
	busy    *Queue // one of the named queues that was not idle; nil: none
}

// Idle answers it. While the queue that was busy the last time still is, the cost does not depend
// on how many queues are named.
func (s *State) Idle(i *Idleness) bool {
	// tasks may be on their way to other shards
	if s.Mail.out.busy() || i.busy != nil && i.busy.isBusy() {
		return false
	}
	if i.busy = nil; len(i.Queues) == 0 {
		s.Names.noteTouched()
		i.Arrived = s.Mail.arrived
		return s.Names.busy == 0
	}
	c := &s.Names.catalogue
	i.Arrived = 0
	for _, name := range i.Queues {
		i.Arrived += c.gone[c.slot(name)]
		if q := s.Names.Queues[name]; q != nil {
			if q.isBusy() {
				i.busy = q
				return false
			}
			i.Arrived += q.arrived
		}
	}
	return true
}
