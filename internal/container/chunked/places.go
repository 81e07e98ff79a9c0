package chunked

// Places is a list whose elements stay in their places. The place of a removed one has the zero
// value of T until another one gets it.
type Places[T any] struct {
	List[T]
	free List[int]
}

// Put adds an element, and returns its place.
func (p *Places[T]) Put(v T) (place int) {
	if p.free.Len() == 0 {
		p.Append(v)
		return p.Len() - 1
	}
	place = p.free.Pop()
	p.Set(place, v)
	return place
}

// Empty removes the element in a place.
func (p *Places[T]) Empty(place int) {
	var none T
	p.Set(place, none)
	p.free.Append(place)
}
