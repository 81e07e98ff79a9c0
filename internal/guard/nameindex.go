package guard

// NameIndex gives names numbers, from 0 in the order in which they first come.
type NameIndex map[string]int

// Of returns the number of a name. If the index is full, all further names share one, as "".
func (x *NameIndex) Of(name string, most int) (n int, as string, isNew bool) {
	n, ok := (*x)[name]
	if !ok && len(*x) >= most {
		name = ""
		n, ok = (*x)[name]
	}
	if !ok {
		if *x == nil {
			*x = make(NameIndex)
		}
		n = len(*x)
		(*x)[name] = n
	}
	return n, name, !ok
}
