"""What is computed: the graph, passes that fuse it, its memory plan, its lowering to a native Program."""
