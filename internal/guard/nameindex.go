package guard

// NameIndex numbers names from 0, in the order of their first use.
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
