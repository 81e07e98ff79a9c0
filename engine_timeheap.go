package codeq

import pq "container/heap"

// timeHeap is what is due at some time or other. What is due first is at index 0.
type timeHeap[T timed] struct{ items []T }

// timed is an item of a timeHeap.
type timed interface {
	comparable
	due() uint64 // does not change while the item is in the heap
	spot() *int  // its index; negative: it is in no heap
}

func (h *timeHeap[T]) push(item T) { pq.Push((*timedItems[T])(h), item) }

// pop takes out what is due first. REQUIRES: there is something.
func (h *timeHeap[T]) pop() T { return pq.Pop((*timedItems[T])(h)).(T) }

// remove takes out an item, if it is in.
func (h *timeHeap[T]) remove(item T) {
	if at := *item.spot(); at >= 0 {
		pq.Remove((*timedItems[T])(h), at)
	}
}

func (h *timeHeap[T]) len() int { return len(h.items) }

// next is when the first item is due; never: there is none.
func (h *timeHeap[T]) next() uint64 {
	if len(h.items) == 0 {
		return never
	}
	return h.items[0].due()
}

// timedItems is a timeHeap as container/heap wants it.
type timedItems[T timed] timeHeap[T]

func (h *timedItems[T]) Len() int           { return len(h.items) }
func (h *timedItems[T]) Less(i, j int) bool { return h.items[i].due() < h.items[j].due() }

func (h *timedItems[T]) Swap(i, j int) {
	h.items[i], h.items[j] = h.items[j], h.items[i]
	*h.items[i].spot(), *h.items[j].spot() = i, j
}

func (h *timedItems[T]) Push(x any) {
	item := x.(T)
	*item.spot() = len(h.items)
	h.items = append(h.items, item)
}

func (h *timedItems[T]) Pop() any {
	n := len(h.items) - 1
	item := h.items[n]
	*item.spot() = -1
	var none T
	h.items[n] = none
	h.items = h.items[:n]
	return item
}
