// Package timeheap is a priority queue of items ordered by due time.
package timeheap

import (
	pq "container/heap"
	"math"
)

// Never is later than any time.
const Never = math.MaxUint64

// Heap holds items with due times. The earliest is at index 0.
type Heap[T Item] struct{ items []T }

// Item is an item of a Heap.
type Item interface {
	comparable
	Due() uint64 // must not change while the item is in the heap
	Spot() *int  // its index; negative: it is in no heap
}

// Push adds an item that is not in the heap.
func (h *Heap[T]) Push(item T) { pq.Push((*items[T])(h), item) }

// Pop removes the item with the earliest due time. REQUIRES: the heap is not empty.
func (h *Heap[T]) Pop() T { return pq.Pop((*items[T])(h)).(T) }

// Remove removes an item, if it is in the heap.
func (h *Heap[T]) Remove(item T) {
	if at := *item.Spot(); at >= 0 {
		pq.Remove((*items[T])(h), at)
	}
}

// Len returns the number of items.
func (h *Heap[T]) Len() int { return len(h.items) }

// Items returns the items, in no order. They must not be changed.
func (h *Heap[T]) Items() []T { return h.items }

// Next returns the earliest due time, or Never.
func (h *Heap[T]) Next() uint64 {
	if len(h.items) == 0 {
		return Never
	}
	return h.items[0].Due()
}

// items implements heap.Interface.
type items[T Item] Heap[T]

func (h *items[T]) Len() int           { return len(h.items) }
func (h *items[T]) Less(i, j int) bool { return h.items[i].Due() < h.items[j].Due() }

func (h *items[T]) Swap(i, j int) {
	h.items[i], h.items[j] = h.items[j], h.items[i]
	*h.items[i].Spot(), *h.items[j].Spot() = i, j
}

func (h *items[T]) Push(x any) {
	item := x.(T)
	*item.Spot() = len(h.items)
	h.items = append(h.items, item)
}

func (h *items[T]) Pop() any {
	n := len(h.items) - 1
	item := h.items[n]
	*item.Spot() = -1
	var none T
	h.items[n] = none
	h.items = h.items[:n]
	return item
}
